"""Virtual compute: chunks that sleep instead of computing, so that many ranks fit on few cores; messages are real."""
