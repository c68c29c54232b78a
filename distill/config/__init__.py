"""All settings of ``python -m distill``, one dataclass a section; imports core only."""
