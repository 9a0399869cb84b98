// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestPaceBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPace()
		begin := time.Now()
		for range 10 { // one that ends each connection at once
			p.Begin(true)
			p.End(t.Context())
		}
		if d := time.Since(begin); d < 30*time.Second || d > 60*time.Second {
			t.Errorf("10 looks took %v", d)
		}
		p.Begin(true)
		time.Sleep(MaxPause)
		begin = time.Now()
		p.End(t.Context())
		if d := time.Since(begin); d > 0 {
			t.Errorf("after a long connection it is looked at after %v", d)
		}
		p.Begin(false)
		p.Begin(true)
		begin = time.Now()
		p.End(t.Context())
		if d := time.Since(begin); d > 0 {
			t.Errorf("after the peer was gone it is looked at after %v", d)
		}
	})
}

func TestCautiousPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewCautiousPace()
		begin := time.Now()
		for range 10 { // it dies of each connection, and refuses others until it is started again
			p.Begin(true)
			p.End(t.Context())
			p.Begin(false)
		}
		if d := time.Since(begin); d < 8*time.Minute {
			t.Errorf("10 connections took %v", d)
		}
		p.Begin(true)
		time.Sleep(MaxPause)
		begin = time.Now()
		p.End(t.Context())
		if d := time.Since(begin); d > 0 {
			t.Errorf("after a long connection it is tried after %v", d)
		}
	})
}

// A peer that restarts is found within a pause, also if that takes seconds.
func TestPaceDuringRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPace()
		for range 2 { // each restart
			for begin := time.Now(); time.Since(begin) < restart; {
				last := time.Now()
				p.Begin(false)
				p.Down(t.Context())
				if d := time.Since(last); d != downMin {
					t.Errorf("%v after the first attempt the pause is %v, want %v", last.Sub(begin), d, downMin)
				}
			}
			time.Sleep(time.Minute)
			p.Begin(true)
		}
	})
}

// A peer that is away is looked for ever less often, and at once after a restart.
func TestPaceOfAnAbsentPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPace()
		begin, attempts := time.Now(), 0
		for time.Since(begin) < time.Hour {
			p.Begin(false)
			p.Down(t.Context())
			attempts++
		}
		if attempts > 800 {
			t.Errorf("%d attempts in an hour", attempts)
		}
		p.Begin(true)
		p.Begin(false)
		begin = time.Now()
		p.Down(t.Context())
		if d := time.Since(begin); d > downMin {
			t.Errorf("the first pause after it was there is %s", d)
		}
	})
}
