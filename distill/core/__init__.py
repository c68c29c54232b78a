"""What every room uses: safe files and fingerprints, ranks of a distributed run; imports nothing of distill."""
