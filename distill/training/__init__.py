"""Training by Lightning: modules, trainer, checkpoints, distribution; imports eagle, teacher and what is below."""
