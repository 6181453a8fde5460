"""Tasks out, paced so that what is dispatched now can still be trained within the staleness bound.

`pace` says how many groups, `plan` which ones; both are pure. `client` reads data sets, `app` reads
and writes the log.
"""
