// Never linked: a compiler must warn of both lines that drop what they were told.
#include "kvzc/status.h"

kvzc::Status work();
kvzc::Result<int> count();

void drop() {
  work();
  count();
}
