"""The corpus that a draft is trained on: sources, splits, tokenizer, label masks, batches."""
