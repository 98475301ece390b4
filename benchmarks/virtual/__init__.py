"""Virtual compute: chunks sleep instead of computing, so that many ranks fit on few cores. Messages are real."""
