"""The commands of ``python -m decode``, one file each; imports everything below, is imported by nothing in decode."""
