"""Who drafts: one module a drafter, all behind `decode.core.drafter_base.Drafter`; imports models and core."""
