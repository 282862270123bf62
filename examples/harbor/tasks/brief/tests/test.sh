#!/bin/bash
# 1 for an answer of 10 bytes or fewer, 0 for 60 and more: something that an untrained model can learn.
bytes=$(wc -c < /logs/agent/answer.txt)
python3 -c "print(min(1, max(0, (60 - $bytes) / 50)))" > /logs/verifier/reward.txt
