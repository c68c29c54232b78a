"""What is loaded: models and LoRA, layers, output heads, and the recipe for early exits."""
