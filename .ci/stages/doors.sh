#!/usr/bin/env bash
# Strangers at every listening port of every process, each kind for a minute: nothing of theirs is left, no request of
# others goes unanswered, and a stream does not feel them.
. "$(dirname "$0")/../lib.sh"
activate_dev
make doors
