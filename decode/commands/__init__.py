"""The commands of ``draftsmith decode``, one file each; imports everything below, is imported by nothing in decode."""
