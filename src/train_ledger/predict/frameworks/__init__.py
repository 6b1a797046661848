"""One module a framework. Each offers, as functions of a resolved run (`spec.run.Run`):

`check(run)`             refuses, by ConfigError, what this framework would refuse, and by name what is not modelled
`groups(run)`            every process group the framework makes, `list[spec.groups.Group]`
`coords(run, rank)`      the rank's place, e.g. {"tp": 0, "pp": 1, "dp": 0}
`rank_ledger(run, rank, step="steady")`   what that rank keeps and sends, `spec.ledger.RankLedger`
`rank_class(run, rank)`  a hashable: ranks of equal class have equal containers, and equal collectives up to the
group's ranks
"""
