"""Text of spoken answers: normalisation, segmentation, stream filters."""
