/* The logger that is passed to plugins: formats a line and hands it to Rust. */
#include <stdarg.h>
#include <stdio.h>

void crossrail_nccl_line(int level, const char *text);

void crossrail_nccl_logger(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
  char text[1024];
  va_list arguments;
  (void)flags;
  (void)file;
  (void)line;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  crossrail_nccl_line(level, text);
}
