"""The method of the paper in plain torch: budgets, scores, supports and calibration."""
