"""Training of the embedded model: generator, vocabulary, model, training and evaluation. Not part of CI."""
