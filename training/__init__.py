"""What a training needs beside its loop (train.py): settings, the run's folder, validation.

config.py has every flag and preset, runs.py folders and checkpoints, validation.py what a model
scores, warm_start.py how a training begins from a trained model. These files may import the method
(model and below), baselines, interop and corpus, and nothing above.
"""
