"""Who drafts: one module a drafter, all behind `decode.core.drafter.Drafter`; imports models and core."""
