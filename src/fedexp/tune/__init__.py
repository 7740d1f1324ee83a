"""Hyperparameter search: the paper's grids, Optuna's TPE, and the paper's rule of thumb for eps.

A search decides which trials to run over the values of `grids`, and scores them (`search`); a trial
is a short run, executed by `fedexp.runs.pool` and not stored. An Optuna study in an SQLite file
stores their values and scores (`store`); `results` makes tables and figures of them.
"""
