"""What a person writes: job files, manifests, and how a job is launched, as files and command lines say it."""
