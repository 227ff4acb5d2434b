"""Worker processes for code that is not ours: rewards and tools run in them.

trainer (`process.WorkerProcess`) -> guardian (`guardian`, runs nothing foreign) -> worker (`worker`) -> what it starts.
What starts and ends a process, whatever runs in it, is `guarded.GuardedProcess`.
"""
