"""The second host: owns memory, and says what it sees. Argument: the folder of notes."""

import sys
import time

from notes import Notes, engine

notes = Notes(sys.argv[1])
with engine(listen="10.9.1.2:7000") as owner:
    memory = bytearray(64 << 20)
    with owner.register(memory) as region:
        notes.write(sys.argv[2], region.handle().to_text())
        while True:
            for arrival in owner.arrivals.poll(100):
                word, _, value = arrival.tag.decode().partition(" ")
                if word == "check":
                    # All of it is there, since the tag is.
                    begin, nbytes, byte = map(int, value.split())
                    part = memory[begin : begin + nbytes]
                    good = part == bytes([byte]) * nbytes and arrival.error is None
                    owner.notify(arrival.peer, b"good" if good else b"BAD")
            time.sleep(0.01)
