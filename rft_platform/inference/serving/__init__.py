"""What every engine's server is made of: schema, errors, control plane, lease and idle time-out."""
