"""A development broker: one process that speaks the Kafka protocol and keeps its topics in files.

It exists so that a laptop, a test suite and a few machines of a trial need no cluster. It has one node and
no replicas, no quotas and no rights (who may log in may do anything): in production, use Apache Kafka. What it does have behaves as Kafka's
documentation says: keyed order, idempotent producers, transactions, consumer groups, seeking by offset
and time, retention, compaction, and no acknowledged record lost when the process is killed.

    aiokafka_private  the request layouts and record codec borrowed from aiokafka
    protocol          which requests are understood, and how bytes become dicts and dicts bytes
    records           headers of record batches, transaction markers
    segments          one append-only file of batches; finds and cuts a torn tail
    producers         what a partition knows of its producers: recent batches, open and aborted transactions
    partition_log     segments + index + producers = one partition
    compaction        keeps the newest record of every key
    topic_config      the per-topic settings, their defaults and checks
    store             topics, committed offsets and transactions, in sqlite
    topics            the catalogue of topics and their partitions
    groups            the classic consumer-group protocol
    transactions      the transaction coordinator
    broker            all of the above, as one object
    login             who may use a connection: SASL
    handlers/         one function for each kind of request
    server            connections, timers, start and stop
    app               starts the process, and explains in one line why it cannot
    testing           a broker in a subprocess, for tests
"""
