"""Feature heads and block heads: networks, decoding forwards, files."""
