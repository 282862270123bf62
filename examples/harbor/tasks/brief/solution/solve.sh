#!/bin/bash
echo nothing to run
