"""Acceptance probes: will the full model accept what an early exit, or a draft model, proposes?"""
