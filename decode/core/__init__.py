"""The loop of every decoding method and the parts it is made of."""
