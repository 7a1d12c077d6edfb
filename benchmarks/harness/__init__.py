"""What all measurements share: results files, workers, trainings, contenders, the cost model."""
