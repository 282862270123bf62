#!/bin/bash
# Half of the reward for the file, the other half for what is in it.
reward=0
[ -f /app/greeting.txt ] && reward=0.5
[ "$(cat /app/greeting.txt 2>/dev/null)" = hello ] && reward=1
echo "$reward" > /logs/verifier/reward.txt
