"""Tuning of a training job: several trainings with settings that are drawn, of which the best is released."""
