"""Other programs that run models through batchgen; each module imports what it integrates with."""
