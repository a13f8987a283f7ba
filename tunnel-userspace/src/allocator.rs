//! The memory allocator: jemalloc. A background thread of jemalloc returns freed memory to the kernel about a second after
//! it was freed. glibc and musl return memory only if it is at the end of a heap, or mapped on its own. A daemon would
//! therefore keep the memory that it once needed, for example for the buffers of many streams.
//!
//! `.cargo/config.toml` contains jemalloc's settings. The environment variable `_RJEM_MALLOC_CONF` overrides them.

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;
