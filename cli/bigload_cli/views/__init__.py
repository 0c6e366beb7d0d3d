"""Values of the library to rich renderables. Pure: nothing here reads, writes or decides."""
