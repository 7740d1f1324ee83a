"""Hyperparameter search: the paper's grids, Optuna's TPE, and the paper's rule of thumb for eps.

A trial is a short run (`trial`), executed by `fedexp.runs.pool` and not stored. A search decides
which trials to run (`search`, `epsilon`, over the values of `grids`); an Optuna study in an SQLite
file stores their values and scores (`store`); `results` makes tables and figures of them.
"""
