"""Token ids with label masks, of texts, pairs and chats."""
