#!/bin/bash
python3 -c "print(sum(map(int, open('/app/data/numbers.txt'))))" > /app/total.txt
