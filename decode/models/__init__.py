"""Models as decoding reads them: opening, runners and their caches, text to ids; imports core only."""
