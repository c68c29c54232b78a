"""What feature heads learn from: the target's states, drafting steps; imports teacher and what is below."""
