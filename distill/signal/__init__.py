"""The frozen target as a source of distributions and features: by a forward pass, or kept on disk."""
