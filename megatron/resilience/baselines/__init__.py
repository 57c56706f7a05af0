"""What a job goes through without TrainMover, behind the same interface, so that it can be compared."""
