"""Commands that start or question a serving engine, and their settings."""
