"""The loop IR: what elementwise work, reductions, normalisations and data movement become before they are printed."""
