// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
)

// Names of methods.
const (
	MethodFentry     = "fentry"
	MethodKprobe     = "kprobe"
	MethodTPBTF      = "tp_btf"
	MethodTracepoint = "tracepoint"
	MethodCgroup     = "cgroup"
	MethodIter       = "iter"
	MethodSocket     = "socket" // a filter of a socket
)

// Method is the mechanism by which one capability is observed.
type Method struct {
	Capability string
	Name       string   // MethodFentry, ...
	Err        error    // why better methods failed, joined; nil if none did
	Failed     []string // names of these methods, best first
	Lost       string   // what this method does not see, human-readable; may be empty
}

// LogAttr has the attributes of m in a log line that are not empty: "capability", "method",
// "lost", and "better", why better methods failed.
func (m Method) LogAttr() slog.Attr {
	var attrs []slog.Attr
	for _, a := range []slog.Attr{
		slog.String("capability", m.Capability), slog.String("method", m.Name),
		slog.String("lost", m.Lost), slog.String("better", Brief(m.Err)),
	} {
		if a.Value.String() != "" {
			attrs = append(attrs, a)
		}
	}
	return slog.GroupAttrs("", attrs...)
}

// Capability is what can be observed by more than one method.
type Capability struct {
	Name    string
	Choices []Choice // best first
}

// Choice is one method of a capability.
type Choice struct {
	Name   string
	Lost   string   // what it does not see, human-readable
	Hooks  []string // names of programs in the order of attaching; none if it needs nothing
	Always bool     // tried even if it is not among the allowed
}

// Attach tries the choices that are allowed (none named: all) in order; any error
// leads to the next one. A nil attach leaves only choices without hooks, and
// cause is the reason. It fails if no choice is left.
func (c Capability) Attach(attach func(hooks []string) error, cause error, allowed []string) (Method, error) {
	var errs []error
	var failed []string
	if attach == nil && cause != nil {
		errs = append(errs, cause)
	}
	for _, choice := range c.Choices {
		if len(choice.Hooks) > 0 {
			if attach == nil || len(allowed) > 0 && !choice.Always && !slices.Contains(allowed, choice.Name) {
				continue
			}
			if err := attach(choice.Hooks); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", choice.Name, err))
				failed = append(failed, choice.Name)
				continue
			}
		}
		return Method{Capability: c.Name, Name: choice.Name, Lost: choice.Lost, Err: errors.Join(errs...), Failed: failed}, nil
	}
	return Method{}, errors.Join(errs...)
}
