"""What modules refuse: `settings` before any training, `going_on` where a checkpoint is gone on with."""
