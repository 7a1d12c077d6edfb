"""What every kind of task needs: workers, settings, progress, checkpoints, files of text."""
