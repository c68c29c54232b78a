"""Who drafts: one module a drafter, all behind `decode.drafters.base.Drafter`; imports models and core."""
