"""The distillation loss: divergences, token selection, the chunked loss."""
