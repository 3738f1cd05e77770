"""A real prefill/decode split over kvzc, small enough to read: ``kvzc demo``.

====================  =====================================================================
``model``             a decoder-only transformer in plain torch
``cache``             the paged KV cache that it writes and reads
``text``              the prompt, as byte tokens
``job``               what one run asks of its processes
``channel``           a child's end of the pipes: JSON lines
``crew``              the parent's end: start, listen, reap
``prefill``           child 1: computes the prompt, puts each layer's KV as soon as it is there
``decode``            child 2: owns the target cache, waits for the layers, generates
``reference``         child 3: does both alone
``floor``             what copies of the same bytes cost inside one process
``run``               the parent: order of events, verdict, exit code
``report``            the result as JSON and as a table
====================  =====================================================================
"""
