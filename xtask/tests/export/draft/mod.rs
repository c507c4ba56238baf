//! Draft graphs, run: against recorded values of an independent implementation, and against what breaks them.

mod choices;
mod command;
mod forms;
mod goldens;
mod pairs;
mod support;
mod variants;
mod whole_loop;
