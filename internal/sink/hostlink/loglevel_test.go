// SPDX-License-Identifier: Apache-2.0

package hostlink

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/wire"
)

func askFor(number uint64, level string, components ...string) wire.Control {
	return wire.Control{LogLevel: &wire.LogLevel{Number: number, Level: level, Components: components, Seconds: 60}}
}

func TestLogLevelOfTheHost(t *testing.T) {
	asked := make(chan string, 3)
	r := newRig(t, func(o *Options) {
		o.SetLogLevel = func(level string, components []string, lasts time.Duration) error {
			asked <- fmt.Sprint(level, components, lasts)
			if level != "debug" {
				return errors.New("refused\n" + strings.Repeat("x", wire.MaxReason))
			}
			return nil
		}
	})
	p := r.connect("h")
	p.say(askFor(7, "debug", "nat"), askFor(8, "loud"))
	if a := p.next().LogLevelSet; a == nil || a.Number != 7 || a.Reason != "" {
		t.Errorf("%+v", a)
	}
	if a := p.next().LogLevelSet; a == nil || a.Number != 8 || !strings.HasPrefix(a.Reason, "refused x") {
		t.Errorf("%+v", a)
	}
	if first, second := <-asked, <-asked; first != "debug[nat] 1m0s" || second != "loud[] 1m0s" {
		t.Errorf("%s, %s", first, second)
	}
}

func TestLogLevelIsForbidden(t *testing.T) {
	p := newRig(t).connect("h")
	p.say(askFor(1, "debug"))
	if a := p.next().LogLevelSet; a == nil || !strings.Contains(a.Reason, "no log level from a host") {
		t.Errorf("%+v", a)
	}
}
