"""Lightning modules and the trainer that runs them."""
